"""--schedule pipedream, pipedream-vertical-sync, pipedream-2bw: a pipeline that does not drain between steps."""
