"""The HTTP API: the routes of functions/api, the authorizer, a request limit, an access log."""

from __future__ import annotations

import json

import jsii
from aws_cdk import Duration
from aws_cdk import aws_apigatewayv2 as gateway
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk.aws_apigateway import AccessLogFormat
from aws_cdk.aws_apigatewayv2_authorizers import HttpLambdaAuthorizer, HttpLambdaResponseType
from aws_cdk.aws_apigatewayv2_integrations import HttpLambdaIntegration
from constructs import Construct

from cdk.resources.logs import log_group
from cdk.resources.nag_suppressions import UNGUARDED, acknowledge
from cdk.stage import StageSettings
from functions.api.http.route import all_routes

KEY_SOURCE = "$request.header.x-api-key"
AUTHORIZER_CACHE_S = 60
"""Lifetime of a cached answer of the authorizer: a revoked key works for at most this time."""
BURST_FACTOR = 2
ACCESS_LOG_FIELDS = {
    "request_id": "$context.requestId",
    "at": "$context.requestTimeEpoch",
    "route": "$context.routeKey",
    "status": "$context.status",
    "latency_ms": "$context.responseLatency",
    "key_id": "$context.authorizer.key_id",
    "error": "$context.error.message",
    "integration_error": "$context.integrationErrorMessage",
}
"""Fields of the access log; path and query are absent, since they contain names of users' files and multipart ids."""


class Api(Construct):
    """The HTTP API; `url` is the address for users and workers."""

    def __init__(
        self, scope: Construct, id_: str, *, stage: StageSettings, functions: dict[str, lambda_.Function]
    ) -> None:
        super().__init__(scope, id_)
        api = gateway.HttpApi(self, "Http", api_name=f"{stage.prefix}api", create_default_stage=False)
        authorizer = HttpLambdaAuthorizer(
            "Authorizer",
            functions["authorizer"],
            authorizer_name=f"{stage.prefix}keys",
            identity_source=[KEY_SOURCE],
            response_types=[HttpLambdaResponseType.SIMPLE],
            results_cache_ttl=Duration.seconds(AUTHORIZER_CACHE_S),
        )
        integrations = {
            # One permission per function instead of one per route: the policy of a function is limited to 20 kB.
            name: HttpLambdaIntegration(name.capitalize(), functions[name], scope_permission_to_route=False)
            for name in sorted({route.function for route in all_routes()})
        }
        for route in all_routes():
            made = api.add_routes(
                path=route.path,
                methods=[gateway.HttpMethod(route.method)],
                integration=integrations[route.function],
                authorizer=authorizer if route.scopes else gateway.HttpNoneAuthorizer(),
            )
            if not route.scopes:
                acknowledge(made[0], "APIG4", UNGUARDED)
        gateway.HttpStage(
            self,
            "Stage",
            http_api=api,
            stage_name="$default",
            auto_deploy=True,
            # Metrics per route cost as custom metrics do, six for each of 40 routes. The access log contains the route.
            throttle=gateway.ThrottleSettings(
                rate_limit=stage.max_requests_per_s, burst_limit=stage.max_requests_per_s * BURST_FACTOR
            ),
            access_log_settings=_AccessLog(log_group(self, "Requests", stage=stage, service="apigateway", name="api")),
        )
        self.http = api
        self.url = api.api_endpoint


@jsii.implements(gateway.IAccessLogSettings)
class _AccessLog:
    """Format of the access log: one JSON line per request."""

    def __init__(self, log: logs.LogGroup) -> None:
        self._destination = gateway.LogGroupLogDestination(log)

    @property
    def destination(self) -> gateway.IAccessLogDestination:
        """Log group of the access log."""
        return self._destination

    @property
    def format(self) -> AccessLogFormat:
        """JSON of ACCESS_LOG_FIELDS."""
        return AccessLogFormat.custom(json.dumps(ACCESS_LOG_FIELDS))
