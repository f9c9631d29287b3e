"""Tools of servers that speak the Model Context Protocol (`tool.mcp`).

`server_file` reads the file, `listing` asks each server for its tools before the run starts,
`server` makes them tools of the run, `connection` is one session with a server, and `answer` turns
an answer into text and images.
"""
