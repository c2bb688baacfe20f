"""Test the template: retained data, private resources, log retention, permissions, alarms."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from baton.contract.fleets.money import Budget
from cdk.resources.access import ACCESS, BUCKET_ACTIONS
from cdk.resources.alarms import ALARMS
from cdk.resources.api import ACCESS_LOG_FIELDS, KEY_SOURCE
from cdk.resources.functions import SCHEDULED, TIMEOUT_S
from cdk.stage import READY_SHARDS_TAG
from functions.api.http.route import all_routes
from functions.api.operations.cloudwatch_metrics import DIMENSION, NAMESPACE, UNITS
from functions.api.operations.service_probe import PROBED_PATH
from functions.domain.webhooks import GIVE_UP_AFTER_S, backoff_s
from functions.settings import ControlPlaneSettings
from functions.storage.s3.object_headers import EXPIRING_TAG
from functions.storage.stream import FILTER, NUDGES
from functions.storage.tables import STREAM, TABLES
from functions.webhooks.http_delivery import RESOLVE_TIMEOUT_S, TOTAL_TIMEOUT_S
from tests.infrastructure.conftest import of_type, template_of

Json = dict[str, Any]
FUNCTIONS = pytest.mark.parametrize("name", sorted(ACCESS))


@pytest.fixture(scope="module")
def configured() -> Json:
    """Synthesize one template with the settings that several tests compare with the default template."""
    settings = {"ready_shards": "4", "ring_sample_days": "30", "fleet_budget": '{"per_month_usd": 500}'}
    return template_of(**settings, original_progress_s="3600", alarm_email="ops@example.com")


@pytest.fixture(scope="module")
def disposable() -> Json:
    """Synthesize the template of another stage, whose tables and buckets end with the stack."""
    return template_of(stage="other", disposable="true")


def functions(template: Json) -> dict[str, Json]:
    """Return the properties of the functions by their name in the table of permissions."""
    return {
        made["Properties"]["FunctionName"].removeprefix("baton-test-"): made["Properties"]
        for made in of_type(template, "AWS::Lambda::Function").values()
    }


def allowed(template: Json, name: str) -> set[tuple[str, str]]:
    """Return action and resource of every permission of a function's role."""
    role = functions(template)[name]["Role"]["Fn::GetAtt"][0]
    found = set()
    for policy in of_type(template, "AWS::IAM::Policy").values():
        if {"Ref": role} not in policy["Properties"]["Roles"]:
            continue
        for statement in policy["Properties"]["PolicyDocument"]["Statement"]:
            assert statement["Effect"] == "Allow" and "Condition" not in statement
            actions = statement["Action"]
            for action in [actions] if isinstance(actions, str) else actions:
                assert isinstance(statement["Resource"], dict), "one resource a statement, and no literal star"
                found.add((action, _text(statement["Resource"])))
    return found


def _text(resource: Json) -> str:
    """Format an ARN as `<logical id>` and its suffix, another attribute as `<logical id>.<attribute>`."""
    if "Fn::GetAtt" in resource:
        owner, attribute = resource["Fn::GetAtt"]
        return f"<{owner}>" if attribute == "Arn" else f"<{owner}>.{attribute}"
    if "Ref" in resource:
        return f"<{resource['Ref']}>"
    separator, parts = resource["Fn::Join"]
    assert separator == ""
    return "".join(_text(part) if isinstance(part, dict) else part for part in parts)


def _logical_id(template: Json, kind: str, start: str) -> str:
    (found,) = [name for name in of_type(template, kind) if name.startswith(start)]
    return found


PLACES = {"rings": "*/rings/*", "machines": "*/preflight/*"}
"""Objects of each function that may not touch all objects of its buckets."""
WRITTEN = {"submitter": "*/jobs/*/curves/*"}
"""Objects that a function may put, if it may read others, too."""


@FUNCTIONS
def test_a_function_may_do_what_the_table_says_and_nothing_else(template: Json, name: str) -> None:
    expected = set()
    for place, actions in ACCESS[name].tables.items():
        suffix, _, index = place.partition("/")
        arn = f"<{_logical_id(template, 'AWS::DynamoDB::Table', f'Tables{suffix.capitalize()}')}>"
        expected |= {(f"dynamodb:{action}", arn + (f"/index/{index}" if index else "")) for action in actions}
    for bucket, actions in ACCESS[name].buckets.items():
        title = "".join(word.capitalize() for word in bucket.split("-"))
        arn = f"<{_logical_id(template, 'AWS::S3::Bucket', f'Buckets{title}')}>"
        objects = f"{arn}/{PLACES.get(name, '*')}"
        written = f"{arn}/{WRITTEN[name]}" if name in WRITTEN else objects
        expected |= {
            (f"s3:{action}", arn if action in BUCKET_ACTIONS else written if action == "PutObject" else objects)
            for action in actions
        }
    for suffix, actions in ACCESS[name].streams.items():
        arn = f"<{_logical_id(template, 'AWS::DynamoDB::Table', f'Tables{suffix.capitalize()}')}>.StreamArn"
        expected |= {(f"dynamodb:{action}", arn) for action in actions}
    expected |= {
        (f"events:{action}", f"<{_logical_id(template, 'AWS::Events::EventBus', 'EventsBus')}>")
        for action in ACCESS[name].bus
    }
    expected |= {
        (f"sqs:{action}", f"<{_logical_id(template, 'AWS::SQS::Queue', 'EventsDeadLetters')}>")
        for action in ACCESS[name].dead_letters
    }
    expected |= {
        (f"sqs:{action}", f"<{_logical_id(template, 'AWS::SQS::Queue', 'WebhooksLine')}>")
        for action in ACCESS[name].delivery_queue
    }
    secret = "arn:<AWS::Partition>:secretsmanager:<AWS::Region>:<AWS::AccountId>:secret:baton-test-providers-??????"
    expected |= {(f"secretsmanager:{action}", secret) for action in ACCESS[name].provider_secret}
    log = f"<{_logical_id(template, 'AWS::Logs::LogGroup', f'Functions{name.capitalize()}Log')}>"
    expected |= {("logs:CreateLogStream", log), ("logs:PutLogEvents", log)}
    assert allowed(template, name) == expected


def test_no_role_has_a_managed_policy_or_a_trust_but_in_its_service(template: Json) -> None:
    services = set()
    for role in of_type(template, "AWS::IAM::Role").values():
        assert "ManagedPolicyArns" not in role["Properties"] and "Policies" not in role["Properties"]
        (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        services.add(statement["Principal"]["Service"])
    assert services == {"lambda.amazonaws.com", "scheduler.amazonaws.com"}


def test_tables_are_those_of_the_code_and_survive_mistakes(template: Json) -> None:
    made = {table["Properties"]["TableName"]: table for table in of_type(template, "AWS::DynamoDB::Table").values()}
    assert set(made) == {table.name("baton-test-") for table in TABLES}
    for table in TABLES:
        resource, wanted = made[table.name("baton-test-")], table.definition("baton-test-")
        properties = resource["Properties"]
        assert resource["DeletionPolicy"] == resource["UpdateReplacePolicy"] == "Retain"
        assert properties["DeletionProtectionEnabled"] is True
        assert properties["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
        assert properties["BillingMode"] == "PAY_PER_REQUEST"
        assert properties["KeySchema"] == wanted["KeySchema"]
        assert sorted(properties["AttributeDefinitions"], key=json.dumps) == sorted(
            wanted["AttributeDefinitions"], key=json.dumps
        )
        assert properties.get("GlobalSecondaryIndexes", []) == wanted.get("GlobalSecondaryIndexes", [])
        ttl = {"AttributeName": table.ttl_attribute, "Enabled": True} if table.ttl_attribute else None
        assert properties.get("TimeToLiveSpecification") == ttl
        # CloudFormation has no `StreamEnabled`: it is on where there is a view type.
        stream = {"StreamViewType": STREAM["StreamViewType"]} if table.stream else None
        assert properties.get("StreamSpecification") == stream


def test_buckets_are_private_encrypted_and_swept(template: Json) -> None:
    buckets = of_type(template, "AWS::S3::Bucket")
    assert len(buckets) == 2
    policies = {
        policy["Properties"]["Bucket"]["Ref"]: policy["Properties"]["PolicyDocument"]["Statement"]
        for policy in of_type(template, "AWS::S3::BucketPolicy").values()
    }
    for name, bucket in buckets.items():
        assert (bucket["DeletionPolicy"], bucket["UpdateReplacePolicy"]) == ("RetainExceptOnCreate", "Retain")
        properties = bucket["Properties"]
        assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
        (encryption,) = properties["BucketEncryption"]["ServerSideEncryptionConfiguration"]
        assert encryption["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
        rules = properties["LifecycleConfiguration"]["Rules"]
        (rule,) = rules
        assert rule.pop("AbortIncompleteMultipartUpload") == {"DaysAfterInitiation": 7}
        assert rule == {"Id": "abandoned-uploads", "Status": "Enabled"}, "no rule deletes what was stored"
        denied = [statement["Condition"] for statement in policies[name] if statement["Effect"] == "Deny"]
        assert {"Bool": {"aws:SecureTransport": "false"}} in denied
        assert {"NumericLessThan": {"s3:TlsVersion": 1.2}} in denied


def test_pages_of_the_console_alone_read_the_buckets(template: Json) -> None:
    """A verified download is a GET; the file of a checkpoint is ranges of packs."""
    (api,) = of_type(template, "AWS::ApiGatewayV2::Api")
    rule = {
        "AllowedMethods": ["GET"],
        "AllowedHeaders": ["range"],
        "AllowedOrigins": [{"Fn::GetAtt": [api, "ApiEndpoint"]}],
        "MaxAge": 3600,
    }
    for bucket in of_type(template, "AWS::S3::Bucket").values():
        assert bucket["Properties"]["CorsConfiguration"]["CorsRules"] == [rule]


def test_waiting_jobs_are_spread_where_the_stage_says_so(template: Json, configured: Json) -> None:
    """The tag of the table records the number of partitions, since jobs stay in their partition."""
    for name in ACCESS:
        variable = "BATON_READY_SHARDS"
        given = functions(configured)[name]["Environment"]["Variables"][variable]
        assert ControlPlaneSettings.from_environment({variable: given}).ready_shards == 4
        assert variable not in functions(template)[name]["Environment"]["Variables"]
    tagged = {
        table["Properties"]["TableName"]: tag["Value"]
        for table in of_type(configured, "AWS::DynamoDB::Table").values()
        for tag in table["Properties"]["Tags"]
        if tag["Key"] == READY_SHARDS_TAG
    }
    assert tagged == {"baton-test-jobs": "4"}


def test_samples_of_rings_expire_where_the_stage_says_so(template: Json, configured: Json) -> None:
    """The rule applies to tagged objects in the data bucket; only the function that signs for rings may tag."""
    rules = {
        name: [rule for rule in bucket["Properties"]["LifecycleConfiguration"]["Rules"] if "ExpirationInDays" in rule]
        for name, bucket in of_type(configured, "AWS::S3::Bucket").items()
    }
    data = _logical_id(configured, "AWS::S3::Bucket", "BucketsTrainingData")
    assert [name for name, found in rules.items() if found] == [data]
    (rule,) = rules[data]
    key, value = EXPIRING_TAG
    assert rule == {
        "Id": "ring-samples",
        "Status": "Enabled",
        "ExpirationInDays": 30,
        "TagFilters": [{"Key": key, "Value": value}],
    }
    for name in ACCESS:
        more = {("s3:PutObjectTagging", f"<{data}>/*/rings/*")} if name == "rings" else set()
        assert allowed(configured, name) - allowed(template, name) == more
        assert functions(configured)[name]["Environment"]["Variables"]["BATON_SAMPLES_EXPIRE"] == "true"
        assert "BATON_SAMPLES_EXPIRE" not in functions(template)[name]["Environment"]["Variables"]


def test_the_budget_of_all_fleets_reaches_their_functions(template: Json, configured: Json) -> None:
    for name in ("fleet", "machines"):
        given = functions(configured)[name]["Environment"]["Variables"]
        settings = ControlPlaneSettings.from_environment({"BATON_FLEET_BUDGET": given["BATON_FLEET_BUDGET"]})
        assert settings.fleet_budget == Budget(per_month_usd=500)
        assert "BATON_FLEET_BUDGET" not in functions(template)[name]["Environment"]["Variables"]


def test_the_time_without_progress_is_the_stage_s(configured: Json) -> None:
    for made in functions(configured).values():
        variables = made["Environment"]["Variables"]
        assert variables["BATON_ORIGINAL_PROGRESS_S"] == "3600"


def test_a_disposable_stage_leaves_nothing_behind(disposable: Json) -> None:
    for kind in ("AWS::DynamoDB::Table", "AWS::S3::Bucket"):
        for resource in of_type(disposable, kind).values():
            assert resource["DeletionPolicy"] == "Delete"
            assert resource["Properties"].get("DeletionProtectionEnabled") in (None, False)


def test_every_route_is_deployed_to_its_function_behind_the_authorizer(template: Json) -> None:
    integrations = {
        name: made["Properties"]["IntegrationUri"]["Fn::GetAtt"][0]
        for name, made in of_type(template, "AWS::ApiGatewayV2::Integration").items()
    }
    by_logical_id = {
        name: made["Properties"]["FunctionName"].removeprefix("baton-test-")
        for name, made in of_type(template, "AWS::Lambda::Function").items()
    }
    deployed = {}
    for route in of_type(template, "AWS::ApiGatewayV2::Route").values():
        properties = route["Properties"]
        integration = properties["Target"]["Fn::Join"][1][1]["Ref"]
        deployed[properties["RouteKey"]] = (by_logical_id[integrations[integration]], properties["AuthorizationType"])
    assert deployed == {
        route.route_key: (route.function, "CUSTOM" if route.scopes else "NONE") for route in all_routes()
    }
    (authorizer,) = of_type(template, "AWS::ApiGatewayV2::Authorizer").values()
    properties = authorizer["Properties"]
    assert properties["IdentitySource"] == [KEY_SOURCE]
    assert properties["EnableSimpleResponses"] is True
    assert properties["AuthorizerPayloadFormatVersion"] == "2.0"
    assert properties["AuthorizerResultTtlInSeconds"] <= 60, "so long does a revoked key still work"


def test_requests_are_limited_and_logged_without_names_of_files(template: Json) -> None:
    (stage,) = of_type(template, "AWS::ApiGatewayV2::Stage").values()
    settings = stage["Properties"]["DefaultRouteSettings"]
    assert (settings["ThrottlingRateLimit"], settings["ThrottlingBurstLimit"]) == (500, 1000)
    logged = json.loads(stage["Properties"]["AccessLogSettings"]["Format"])
    assert logged == ACCESS_LOG_FIELDS
    assert not [value for value in logged.values() if re.search(r"path|query|header|identity", value)]


@FUNCTIONS
def test_a_function_has_the_settings_it_reads_and_a_log_that_ends(template: Json, name: str) -> None:
    properties = functions(template)[name]
    environment = properties["Environment"]["Variables"]
    known = {f"BATON_{field.upper()}" for field in ControlPlaneSettings.model_fields}
    assert set(environment) <= known, "a variable that nobody reads"
    assert environment["BATON_TABLE_PREFIX"] == "baton-test-"
    assert environment["BATON_ORIGINAL_PROGRESS_S"] == "21600"
    assert properties["Architectures"] == ["arm64"]
    assert properties["Timeout"] <= (55 if name in SCHEDULED else TIMEOUT_S)
    log = template["Resources"][properties["LoggingConfig"]["LogGroup"]["Ref"]]["Properties"]
    assert log["LogGroupName"] == f"/aws/lambda/baton-test-{name}"
    assert log["RetentionInDays"] == 30


def test_the_sweeper_probes_the_way_of_heartbeats(template: Json) -> None:
    (api,) = of_type(template, "AWS::ApiGatewayV2::Api")
    url = {"Fn::Join": ["", [{"Fn::GetAtt": [api, "ApiEndpoint"]}, PROBED_PATH]]}
    assert functions(template)["sweeper"]["Environment"]["Variables"]["BATON_PROBE_URL"] == url
    guarded = {route.route_key for route in all_routes() if route.function == "worker" and route.scopes}
    assert "POST /heartbeat/{id}" in guarded


def test_the_sweeper_and_the_fleets_controller_run_each_minute(template: Json) -> None:
    # The scheduler's repeats are those of a call that Lambda did not take; Lambda's own, of a call that failed.
    unrepeated = {
        made["Properties"]["FunctionName"]["Ref"]
        for made in of_type(template, "AWS::Lambda::EventInvokeConfig").values()
        if (made["Properties"]["MaximumRetryAttempts"], made["Properties"]["Qualifier"]) == (0, "$LATEST")
    }
    invoked = set()
    for schedule in of_type(template, "AWS::Scheduler::Schedule").values():
        properties = schedule["Properties"]
        assert properties["ScheduleExpression"] == "rate(1 minute)"
        assert properties["State"] == "ENABLED"
        assert properties["Target"]["RetryPolicy"]["MaximumRetryAttempts"] == 0
        target = properties["Target"]["Arn"]["Fn::GetAtt"][0]
        assert target in unrepeated
        invoked.add(template["Resources"][target]["Properties"]["FunctionName"].removeprefix("baton-test-"))
    assert invoked == set(SCHEDULED)
    ages = {
        made["Properties"]["FunctionName"]["Ref"].removeprefix("Functions")[:5]: made["Properties"].get(
            "MaximumEventAgeInSeconds"
        )
        for made in of_type(template, "AWS::Lambda::EventInvokeConfig").values()
    }
    assert ages == {"Sweep": 60, "Fleet": 60}, "calls that Lambda could not start do not pile up"


def test_the_controller_of_the_fleets_rents_nothing_by_itself(template: Json) -> None:
    (api,) = of_type(template, "AWS::ApiGatewayV2::Api")
    for name, properties in functions(template).items():
        # A new account has ten concurrent executions, of which AWS lets a deployment reserve none.
        assert "ReservedConcurrentExecutions" not in properties
        variables = properties["Environment"]["Variables"]
        url = {"Fn::GetAtt": [api, "ApiEndpoint"]} if name == "fleet" else None
        assert variables.get("BATON_FLEET_API_URL") == url
        secret = "baton-test-providers" if name in ("fleet", "machines") else None
        assert variables.get("BATON_PROVIDER_SECRET") == secret
        assert "BATON_LOOPBACK_DIRECTORY" not in variables and "BATON_FLEET_CLOCK_SPEED" not in variables


def test_only_new_events_of_jobs_reach_the_publisher_and_none_is_dropped_in_silence(template: Json) -> None:
    feed = template["Resources"][_logical_id(template, "AWS::Lambda::EventSourceMapping", "EventsFeed")]
    properties = feed["Properties"]
    jobs = _logical_id(template, "AWS::DynamoDB::Table", "TablesJobs")
    letters = _logical_id(template, "AWS::SQS::Queue", "EventsDeadLetters")
    assert properties["EventSourceArn"] == {"Fn::GetAtt": [jobs, "StreamArn"]}
    assert template["Resources"][properties["FunctionName"]["Ref"]]["Properties"]["FunctionName"].endswith("-publisher")
    assert [json.loads(one["Pattern"]) for one in properties["FilterCriteria"]["Filters"]] == [FILTER]
    assert properties["StartingPosition"] == "TRIM_HORIZON"
    assert properties["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert properties["BisectBatchOnFunctionError"] is True
    assert properties["DestinationConfig"] == {"OnFailure": {"Destination": {"Fn::GetAtt": [letters, "Arn"]}}}
    assert properties["MaximumRecordAgeInSeconds"] <= 12 * 3600, "half of what the stream keeps is for mending"
    assert "MaximumRetryAttempts" not in properties, "the age limits it: a bus that is away for an hour loses nothing"
    needed = [name for name in feed["DependsOn"] if template["Resources"][name]["Type"] == "AWS::IAM::Policy"]
    assert needed, "Lambda tries the rights when the mapping is made"
    environment = functions(template)["publisher"]["Environment"]["Variables"]
    assert environment["BATON_EVENT_BUS"] == "baton-test"
    assert environment["BATON_DEAD_LETTERS"] == {"Ref": letters}


def test_nudges_reach_the_controller_once_and_cost_nothing_while_nothing_happens(template: Json) -> None:
    for suffix, filters in NUDGES.items():
        feed = template["Resources"][
            _logical_id(template, "AWS::Lambda::EventSourceMapping", f"Nudges{suffix.title()}")
        ]
        properties = feed["Properties"]
        table = _logical_id(template, "AWS::DynamoDB::Table", f"Tables{suffix.title()}")
        assert properties["EventSourceArn"] == {"Fn::GetAtt": [table, "StreamArn"]}
        target = template["Resources"][properties["FunctionName"]["Ref"]]["Properties"]["FunctionName"]
        assert target == "baton-test-fleet"
        assert [json.loads(one["Pattern"]) for one in properties["FilterCriteria"]["Filters"]] == filters
        assert properties["MaximumBatchingWindowInSeconds"] == 2, "many jobs at once are one tick"
        assert (properties["MaximumRetryAttempts"], properties["MaximumRecordAgeInSeconds"]) == (0, 60)
        assert [one for one in feed["DependsOn"] if template["Resources"][one]["Type"] == "AWS::IAM::Policy"]
    readers = [
        made["Properties"]["EventSourceArn"] for made in of_type(template, "AWS::Lambda::EventSourceMapping").values()
    ]
    assert all(readers.count(one) <= 2 for one in readers), "DynamoDB permits two readers of a shard"


def test_the_bus_and_the_dead_letters_are_named_by_the_stage_and_closed(template: Json) -> None:
    (bus,) = of_type(template, "AWS::Events::EventBus").values()
    assert bus["Properties"]["Name"] == "baton-test"
    assert not of_type(template, "AWS::Events::EventBusPolicy"), "no other account publishes here"
    queues = of_type(template, "AWS::SQS::Queue")
    made = [queue["Properties"] for queue in queues.values()]
    assert {queue["QueueName"]: queue["MessageRetentionPeriod"] for queue in made} == {
        "baton-test-dead-letters": 14 * 24 * 3600,
        "baton-test-webhooks.fifo": 4 * 24 * 3600,
        "baton-test-webhooks-dead.fifo": 14 * 24 * 3600,
    }
    assert all(queue["SqsManagedSseEnabled"] is True for queue in made)
    policies = of_type(template, "AWS::SQS::QueuePolicy").values()
    assert {policy["Properties"]["Queues"][0]["Ref"] for policy in policies} == set(queues)
    for policy in policies:
        (statement,) = policy["Properties"]["PolicyDocument"]["Statement"]
        assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_webhooks_wait_in_order_and_what_crashes_their_function_is_put_aside(template: Json) -> None:
    resources = template["Resources"]
    line = _logical_id(template, "AWS::SQS::Queue", "WebhooksLine")
    dead = _logical_id(template, "AWS::SQS::Queue", "WebhooksDead")
    assert resources[line]["Properties"]["FifoQueue"] is True
    redrive = resources[line]["Properties"]["RedrivePolicy"]
    assert redrive == {"deadLetterTargetArn": {"Fn::GetAtt": [dead, "Arn"]}, "maxReceiveCount": 200}
    tries, spent_s = 0, 0
    while spent_s < GIVE_UP_AFTER_S:
        tries, spent_s = tries + 1, spent_s + backoff_s(tries + 1)
    assert 10 * tries > redrive["maxReceiveCount"] > 2 * tries, "a day of tries is no crash"
    assert resources[line]["Properties"]["MessageRetentionPeriod"] > GIVE_UP_AFTER_S
    feed = resources[_logical_id(template, "AWS::Lambda::EventSourceMapping", "WebhooksFeed")]["Properties"]
    assert feed["EventSourceArn"] == {"Fn::GetAtt": [line, "Arn"]}
    assert resources[feed["FunctionName"]["Ref"]]["Properties"]["FunctionName"].endswith("-deliverer")
    assert (feed["BatchSize"], feed["FunctionResponseTypes"]) == (1, ["ReportBatchItemFailures"])
    # Slow servers of one tenant leave the API its share of the account's functions.
    assert 2 <= feed["ScalingConfig"]["MaximumConcurrency"] <= 100
    slowest_s = RESOLVE_TIMEOUT_S + TOTAL_TIMEOUT_S
    assert slowest_s < functions(template)["deliverer"]["Timeout"] - 2, "the slowest server is noted, and no crash"
    for name in ("admin", "publisher", "deliverer"):
        assert functions(template)[name]["Environment"]["Variables"]["BATON_WEBHOOK_LINE"] == {"Ref": line}
        assert "BATON_WEBHOOK_TEST_ORIGIN" not in functions(template)[name]["Environment"]["Variables"]


def test_alarms_watch_every_function_and_table_and_reach_somebody(configured: Json) -> None:
    alarms = {made["Properties"]["AlarmName"]: made for made in of_type(configured, "AWS::CloudWatch::Alarm").values()}
    expected = {"ServerErrors", "SweeperSilent", "FleetSilent", "EventsLate", "EventsDead", "WebhooksDead"}
    expected |= {f"{name.capitalize()}{kind}" for name in ACCESS for kind in ("Errors", "Throttles")}
    expected |= set(ALARMS)
    for table in TABLES:
        places = ["", *(index.name.title().replace("_", "") for index in table.indexes)]
        expected |= {
            f"{table.suffix.capitalize()}{place}{kind}Throttled" for place in places for kind in ("Reads", "Writes")
        }
    assert set(alarms) == {f"baton-test-{name}" for name in expected}
    (topic,) = of_type(configured, "AWS::SNS::Topic")
    (subscription,) = of_type(configured, "AWS::SNS::Subscription").values()
    assert subscription["Properties"]["Endpoint"] == "ops@example.com"
    for alarm in alarms.values():
        assert alarm["Properties"]["AlarmActions"] == [{"Ref": topic}]
        assert alarm["Properties"]["AlarmDescription"]
    # A policy of one's own takes the place of SNS's default, which would let the account's alarms in.
    (policy,) = of_type(configured, "AWS::SNS::TopicPolicy").values()
    may, _ = sorted(policy["Properties"]["PolicyDocument"]["Statement"], key=lambda statement: statement["Effect"])
    assert (may["Effect"], may["Action"], may["Resource"]) == ("Allow", "sns:Publish", {"Ref": topic})
    assert may["Principal"] == {"Service": "cloudwatch.amazonaws.com"}
    assert may["Condition"] == {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    for name in ("Sweeper", "Fleet"):
        silent = alarms[f"baton-test-{name}Silent"]["Properties"]
        assert (silent["TreatMissingData"], silent["ComparisonOperator"]) == ("breaching", "LessThanThreshold")
        assert (silent["Period"], silent["EvaluationPeriods"]) == (300, 1)


def test_each_throttle_alarm_watches_one_table_or_one_of_its_indexes(template: Json) -> None:
    """DynamoDB reports throttles of an index under its name only, and indexes have the hottest partitions."""
    tables = of_type(template, "AWS::DynamoDB::Table")
    wanted = {
        (event, logical_id, index)
        for logical_id, table in tables.items()
        for index in (None, *(one["IndexName"] for one in table["Properties"].get("GlobalSecondaryIndexes", [])))
        for event in ("ReadThrottleEvents", "WriteThrottleEvents")
    }
    found = set()
    for made in of_type(template, "AWS::CloudWatch::Alarm").values():
        alarm = made["Properties"]
        if alarm["Namespace"] == "AWS/DynamoDB":
            where = {dimension["Name"]: dimension["Value"] for dimension in alarm["Dimensions"]}
            assert where.keys() <= {"TableName", "GlobalSecondaryIndexName"}
            found.add((alarm["MetricName"], where["TableName"]["Ref"], where.get("GlobalSecondaryIndexName")))
            assert (alarm["Statistic"], alarm["Threshold"], alarm["TreatMissingData"]) == ("Sum", 0, "notBreaching")
    assert found == wanted
    (board,) = of_type(template, "AWS::CloudWatch::Dashboard").values()
    assert "GlobalSecondaryIndexName" in json.dumps(board["Properties"]["DashboardBody"])


def test_alarms_of_awss_services_watch_what_those_tell(template: Json) -> None:
    """Names and dimensions equal AWS's documentation, since an alarm on an unknown metric never fires."""
    names = {
        "AWS/Lambda": {"Errors", "Throttles", "Invocations", "IteratorAge"},
        "AWS/ApiGateway": {"5xx"},
        "AWS/SQS": {"ApproximateNumberOfMessagesVisible"},
        "AWS/DynamoDB": {"ReadThrottleEvents", "WriteThrottleEvents"},
    }
    dimensions = {
        "AWS/Lambda": ("FunctionName", "AWS::Lambda::Function"),
        "AWS/ApiGateway": ("ApiId", "AWS::ApiGatewayV2::Api"),
        "AWS/SQS": ("QueueName", "AWS::SQS::Queue"),
        "AWS/DynamoDB": ("TableName", "AWS::DynamoDB::Table"),
    }
    watched: Json = {}
    for made in of_type(template, "AWS::CloudWatch::Alarm").values():
        alarm = made["Properties"]
        if (space := alarm["Namespace"]) == NAMESPACE:
            continue
        watched.setdefault(space, set()).add(alarm["MetricName"])
        name, kind = dimensions[space]
        (value,) = [one["Value"] for one in alarm["Dimensions"] if one["Name"] == name]
        owner = value["Ref"] if "Ref" in value else value["Fn::GetAtt"][0]
        assert template["Resources"][owner]["Type"] == kind, alarm["AlarmName"]
    assert watched == names


def test_our_own_metrics_are_those_that_the_functions_write(template: Json) -> None:
    alarms = [made["Properties"] for made in of_type(template, "AWS::CloudWatch::Alarm").values()]
    ours = {alarm["MetricName"]: alarm for alarm in alarms if alarm.get("Namespace") == NAMESPACE}
    assert set(ours) == set(ALARMS) <= set(UNITS)
    for alarm in ours.values():
        assert alarm["Dimensions"] == [{"Name": DIMENSION, "Value": "test"}]
        assert alarm["TreatMissingData"] == "notBreaching", "what is zero is not written"
    assert all("Metrics" not in alarm for alarm in alarms), "the emulated cloud knows no metric math"
    (board,) = of_type(template, "AWS::CloudWatch::Dashboard").values()
    body = json.dumps(board["Properties"]["DashboardBody"])
    assert {name for name in UNITS if name in body} == set(UNITS)
    assert "5xx" in body and "ThrottleEvents" in body and "Throttles" in body
    for name, properties in functions(template).items():
        assert properties["Environment"]["Variables"]["BATON_STAGE"] == "test", name


def test_two_stages_share_no_name(template: Json, disposable: Json) -> None:
    assert "baton-other-" not in json.dumps(template)
    assert "baton-test" not in json.dumps(disposable)
