"""The viewer: what a run directory says, as small answers to a page in the browser, and as one file with all of them."""
