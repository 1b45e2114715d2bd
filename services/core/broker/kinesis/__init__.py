"""Kinesis behind the broker contract, on aiobotocore. Nothing else in the project imports the AWS SDK (docs/adr/0010)."""
