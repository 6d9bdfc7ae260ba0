"""What stands between the user and the engine: arguments, keywords, promotion, agreement along mesh axes."""
