"""Everything at once on one mount: readers, writers at the source, trainers, changed options, faults and kills."""
