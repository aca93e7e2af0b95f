"""Fitted programs and their predictions."""
