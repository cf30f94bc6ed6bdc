"""Values as people read them: rich tables, progress."""
