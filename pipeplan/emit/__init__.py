"""What a plan becomes on disk: DeepSpeed's files, a readable schedule and script, the report and its pictures."""
