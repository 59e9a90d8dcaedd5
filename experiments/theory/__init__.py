"""Bandits, success amplification and a certificate, whose numbers are exact; how figures look."""
