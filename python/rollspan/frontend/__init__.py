"""The pure-Python HTTP frontend (Starlette and uvicorn): the same routes and answers as ``rollspan-http``."""
