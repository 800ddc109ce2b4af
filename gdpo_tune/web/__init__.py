"""The live page of a sweep: what it shows, the server, and the files that the browser loads."""
