"""The format GGUF: one file with weights, vocabulary and chat template, which llama.cpp and Ollama run."""
