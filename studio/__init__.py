"""Studio: pages in the browser that edit configurations, start runs and compare them. Modules without Streamlit prepare
the content; pages and dialogs show it. Flows are started by their deployments or as commands, never imported."""
