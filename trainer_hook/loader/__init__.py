"""What a data loader will read, and has just given: its plans, exchange with other jobs, going on in mid-epoch."""
