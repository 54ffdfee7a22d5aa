"""Studio: a configuration as a form in the browser."""
