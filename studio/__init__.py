"""Studio: pages in the browser that make configurations, start runs and compare them.

Modules without Streamlit make what is shown; the pages and dialogs show it. Flows are started by their
deployments' names or as commands, never imported.
"""
