"""The page about runs: folders (folder.py), charts (chart.py), sections (sections.py, contents.py), and HTML (html.py)."""
