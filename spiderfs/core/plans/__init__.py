"""What trainings will read, and what follows: schedule, foresight, exchange between jobs, how much to fetch ahead."""
