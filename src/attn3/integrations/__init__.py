"""Adapters for frameworks. Each registers attn3 through the framework's public interface and patches nothing."""
