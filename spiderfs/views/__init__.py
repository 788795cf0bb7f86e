"""Views: the samples of a source in another form, made by processes of their own and kept in place of the originals."""
