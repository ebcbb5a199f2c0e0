"""The routes of the gateway, a file for each API."""
