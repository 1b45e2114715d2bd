"""Secrets and rights: keys, tokens, credentials, signatures, logins on Kafka, their files and the end of their validity."""
