"""The picture in the README is what the package draws today."""

import readme_picture

from ddp_teach import launch


def test_stored_picture_is_what_the_package_draws(tmp_path):
    drawn = tmp_path / "bucket_map.svg"
    launch(readme_picture.picture_of_learned_buckets)[0].save(drawn)
    assert drawn.read_text() == readme_picture.TARGET.read_text()
