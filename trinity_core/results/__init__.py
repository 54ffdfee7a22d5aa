"""What runs have stored, looked at afterwards."""
