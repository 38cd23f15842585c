"""Episodes: agents as plain async Python, their tools, and the conversation with the model, token by token."""
