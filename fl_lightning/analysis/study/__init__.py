"""Many runs: points carried out side by side, and a sweep file carried out here."""
