"""Sources that are asked over HTTP and are no buckets: the Hugging Face Hub, and files behind a manifest."""
