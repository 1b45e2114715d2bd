"""Java, jars, and a real Kafka, for Spark, the demo and the tests. Every function blocks; with an event loop, use a thread."""
