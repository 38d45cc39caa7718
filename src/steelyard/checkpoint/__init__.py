"""Find a model and read what surrounds its weights: config, GGUF header, template, stop ids. No torch."""
