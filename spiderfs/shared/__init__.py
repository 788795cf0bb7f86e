"""What several processes, or several rooms, have to agree on."""
