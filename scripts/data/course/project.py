"""The final project, docs/course/final_project.md: write it all, then run `scratchbert course check 11`."""
