"""The pipe file: its models (`pipes` and a module for each part), its checks, the topics that follow from it and their names."""
