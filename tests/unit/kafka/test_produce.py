"""Our produce request is the one that aiokafka would have sent."""

from aiokafka.protocol.produce import ProduceRequest_v7

from services.core.broker.kafka.protocol import Produce


def test_encoded_as_aiokafka_does() -> None:
    """Broken: a broker cuts the request elsewhere, and stores the batch of one partition in another, or nothing."""
    topics = [("orders", [(0, b"xx"), (3, b"yyy")]), ("straße.dead", [(1, b"z")])]
    ours = Produce(topics, 6000).prepare({Produce.API_KEY: (3, 13)})
    theirs = ProduceRequest_v7(None, -1, 6000, topics)
    assert ours.encode() == theirs.encode()
    assert ours.build_request_header(1, "us").encode() == theirs.build_request_header(1, "us").encode()
    assert ours.RESPONSE_TYPE is theirs.RESPONSE_TYPE
