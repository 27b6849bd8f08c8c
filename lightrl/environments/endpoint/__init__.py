"""The endpoint: serves the policy through the APIs of OpenAI and Anthropic to train unmodified agent programs."""
