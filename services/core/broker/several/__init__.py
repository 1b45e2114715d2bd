"""Several brokers as one: each topic lives on one of them, and every operation goes there.

`brokers` opens them, `broker` is the `Broker` above them, `admin` its administration, `consumer` the member of a group that reads
topics of several. They keep the promises of the contract because each promise is about one topic. No operation spans two brokers.
"""
