"""Where rows come from: files, arrays, frameworks."""
