"""What a run came to: analysis of its records, the pages that show it, and exports."""
