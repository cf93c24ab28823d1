"""Load tests over HTTP: of any server that speaks OpenAI's protocol."""
