"""Table of list prices in USD, before taxes, discounts and free tiers."""

from __future__ import annotations

from dataclasses import dataclass

REGION = "us-east-1"
AS_OF = "2026-11"
MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """USD for one unit, and the page that publishes the price."""

    usd: float
    unit: str
    source: str


API = Price(1.00 / MILLION, "HTTP API request, first 300 M a month", "aws.amazon.com/api-gateway/pricing")
LAMBDA_REQUEST = Price(0.20 / MILLION, "Lambda request", "aws.amazon.com/lambda/pricing")
LAMBDA_GB_S = Price(0.0000133334, "Lambda GB-second, arm64", "aws.amazon.com/lambda/pricing")
WRITE = Price(0.625 / MILLION, "DynamoDB write unit, on demand", "aws.amazon.com/dynamodb/pricing/on-demand")
READ = Price(0.125 / MILLION, "DynamoDB read unit, on demand", "aws.amazon.com/dynamodb/pricing/on-demand")
S3_PUT = Price(5.00 / MILLION, "S3 PUT, LIST", "aws.amazon.com/s3/pricing")
S3_GET = Price(0.40 / MILLION, "S3 GET, HEAD", "aws.amazon.com/s3/pricing")
EVENT = Price(1.00 / MILLION, "EventBridge custom event", "aws.amazon.com/eventbridge/pricing")
QUEUE = Price(0.50 / MILLION, "SQS request to a FIFO queue", "aws.amazon.com/sqs/pricing")
LOG_GB = Price(0.50, "CloudWatch Logs, GB taken in", "aws.amazon.com/cloudwatch/pricing")
METRIC_MONTH = Price(0.30, "CloudWatch custom metric and month, by the hour", "aws.amazon.com/cloudwatch/pricing")
ALARM_MONTH = Price(0.10, "CloudWatch alarm and month", "aws.amazon.com/cloudwatch/pricing")
SECRET_MONTH = Price(0.40, "Secrets Manager, secret and month", "aws.amazon.com/secrets-manager/pricing")
SECRET_READ = Price(5.00 / MILLION, "Secrets Manager, call", "aws.amazon.com/secrets-manager/pricing")
DASHBOARD_MONTH = Price(3.00, "CloudWatch dashboard and month, from the fourth on", "aws.amazon.com/cloudwatch/pricing")
EGRESS_GB = Price(0.09, "GB out to the internet, first 10 TB a month", "aws.amazon.com/ec2/pricing/on-demand")
STORAGE_GB_MONTH = Price(0.023, "S3 Standard, GB and month", "aws.amazon.com/s3/pricing")

WORKERS_REQUEST = Price(
    0.30 / MILLION, "Cloudflare Workers request", "developers.cloudflare.com/workers/platform/pricing"
)
D1_ROW = Price(1.00 / MILLION, "Cloudflare D1 row written", "developers.cloudflare.com/d1/platform/pricing")
KV_READ = Price(0.50 / MILLION, "Cloudflare KV read", "developers.cloudflare.com/kv/platform/pricing")
R2_PUT = Price(4.50 / MILLION, "Cloudflare R2 class A operation", "developers.cloudflare.com/r2/pricing")

PRICES = tuple(price for price in list(globals().values()) if isinstance(price, Price))
