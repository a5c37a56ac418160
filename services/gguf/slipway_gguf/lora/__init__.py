"""Write an adapter as a GGUF file that llama.cpp loads beside its base."""
