"""Plans and their consequences: schedule, foresight, exchange between jobs, limits of prefetching."""
