"""A model behind HTTP, on the server of transformers, and a conversation with it in the terminal."""
