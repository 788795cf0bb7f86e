"""The file system without FUSE: names, look-ups, opens, reads, redirects, control files as readers see them."""
