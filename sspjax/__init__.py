"""sspjax: search self-play for language-model agents, in JAX."""

__version__ = "0.1.0"
