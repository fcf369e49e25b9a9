"""The page about runs: what is in their folders (folder.py), charts (chart.py), its sections (sections.py), HTML (html.py)."""
