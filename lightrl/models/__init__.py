"""Policy, value, and reward models on Hugging Face models: loading, LoRA, sequence layouts, and chunked log-probs."""
