"""The final project, docs/course/final_project.md: write it yourself, then run `scratchbert course check 11`."""
