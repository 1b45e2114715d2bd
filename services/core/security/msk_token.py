"""Tokens for AWS MSK with IAM: a request that only AWS's credentials can sign, as text (aws-msk-iam-sasl-signer's protocol).

The request is a GET of `kafka-cluster:Connect` at an address of the region. It is never sent: its URL has the signature (SigV4,
in the query) and the time until which it counts, and the cluster checks them. The token is that URL in base64, without padding.

The credentials are those of AWS's SDK: variables, files, a role of the machine, the container or the pod. A token is made for
each connection: signing takes a millisecond. Credentials that end are kept until shortly before that; those of a file are read
again for each token, because the file may have changed. The module is outside of the Kafka package because that imports no AWS
SDK.
"""

import base64

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import BotoCoreError
from botocore.session import Session

LIFETIME_S = 900
_AGENT = "penstock"


class NoAwsCredentials(Exception):
    """The text is for a person, and shows no secret."""


_lasting: Credentials | None = None
"""Credentials of this process that the SDK renews by itself."""


def _credentials() -> Credentials | None:
    global _lasting
    if _lasting is None:
        found = Session().get_credentials()
        if not isinstance(found, RefreshableCredentials):
            return found
        _lasting = found
    return _lasting


def make_token(region: str) -> str:
    """A token for the next LIFETIME_S. Blocking: it may ask AWS for credentials. Raises NoAwsCredentials."""
    try:
        found = _credentials()
        if found is None:
            raise NoAwsCredentials(
                "there are no AWS credentials. Try: a role for this machine, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return sign(region, found.get_frozen_credentials())
    except BotoCoreError as error:
        raise NoAwsCredentials(f"AWS gives no credentials: {type(error).__name__}") from None


def sign(region: str, credentials: ReadOnlyCredentials) -> str:
    """The token of these credentials, from now on."""
    request = AWSRequest("GET", f"https://kafka.{region}.amazonaws.com/", params={"Action": "kafka-cluster:Connect"})
    SigV4QueryAuth(credentials, "kafka-cluster", region, expires=LIFETIME_S).add_auth(request)
    return base64.urlsafe_b64encode(f"{request.url}&User-Agent={_AGENT}".encode()).decode().rstrip("=")
