"""Java, the jars, and a real Kafka: what the tests, the demo and Spark need from the Java world.

Everything here blocks; call it from a worker thread when an event loop runs.
"""
