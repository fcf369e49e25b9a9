"""Models: parameters declared once, no mesh axis and no backend inside."""
