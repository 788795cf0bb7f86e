"""Archives: tar and zip files of a source, shown as directories of their members."""
