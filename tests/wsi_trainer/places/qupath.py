"""The parts of QuPath that the script uses, as small Groovy classes that print what they are told."""

from __future__ import annotations

from pathlib import Path

CLASSES = {
    "javafx/application/Platform": "class Platform { static void runLater(Closure what) { what() } }",
    "qupath/lib/gui/viewer/overlays/BufferedImageOverlay": """
class BufferedImageOverlay {
    def region, image
    BufferedImageOverlay(options, region, image) { this.region = region; this.image = image }
}""",
    "qupath/lib/images/servers/ImageServerProvider": """
class ImageServerProvider {
    static getPreferredUriImageSupport(Class kind, String uri) { [getBuilders: { [uri] }] as Support }
    interface Support { List getBuilders() }
}""",
    "qupath/lib/io/GsonTools": """
class GsonTools {
    static GsonTools getInstance() { new GsonTools() }
    Map fromJson(String text, Class kind) { new groovy.json.JsonSlurper().parseText(text) }
    String toJson(Map found) { groovy.json.JsonOutput.toJson(found) }
}""",
    "qupath/lib/io/PathIO": """
class PathIO {
    static List readObjectsFromGeoJSON(InputStream stream) {
        new groovy.json.JsonSlurper().parse(stream, 'UTF-8').features.collect { new Found(it) }
    }
    static class Found {
        Map feature
        Found(Map feature) { this.feature = feature }
        String getID() { feature.id }
    }
}""",
    "qupath/lib/regions/ImageRegion": """
class ImageRegion {
    static createInstance(int x, int y, int width, int height, int z, int t) { [x, y, width, height] }
}""",
    "qupath/lib/gui/scripting/QPEx": """
class QPEx {
    static wanted = new groovy.json.JsonSlurper().parse(new File(System.getProperty('wanted')), 'UTF-8')
    static log = [saved: [], objects: [], overlays: [], added: []]
    static images = wanted.images.collect { new Image(it) }
    static project = new Project()
    static getProject() { project }
    static getQuPath() { null }
    static getCurrentImageData() { wanted.shown == null ? null : images[wanted.shown].imageData }
    static getCurrentViewer() { new Viewer() }

    static class Project {
        List getImageList() { images }
        def getEntry(imageData) { images.find { it.imageData.is(imageData) } }
        def addImage(builder) {
            log.added << builder
            def image = new Image([uri: builder, width: wanted.width, height: wanted.height])
            images << image
            return image
        }
        void syncChanges() { println 'LOG ' + groovy.json.JsonOutput.toJson(log) }
    }
    static class Image {
        Map about
        ImageData imageData
        Image(Map about) { this.about = about; imageData = new ImageData(about) }
        List getURIs() { [new URI(about.uri)] }
        void setImageName(String name) { }
        def readImageData() { imageData }
        void saveImageData(data) { log.saved << about.uri; log.objects << data.hierarchy.all*.feature }
    }
    static class ImageData {
        Map about
        Hierarchy hierarchy = new Hierarchy()
        ImageData(Map about) { this.about = about }
        def getServer() { new Server(about: about) }
    }
    static class Server {
        Map about
        int getWidth() { about.width }
        int getHeight() { about.height }
    }
    static class Hierarchy {
        List all = []
        List getAllObjects(boolean root) { all }
        void removeObjects(Collection gone, boolean keep) { all.removeAll(gone) }
        void addObjects(Collection more) { all.addAll(more) }
    }
    static class Viewer {
        def getOverlayOptions() { null }
        void setCustomPixelLayerOverlay(overlay) {
            def image = overlay.image
            log.overlays << [
                region: overlay.region, width: image.width, height: image.height,
                alpha: (0..<image.height).collect { y -> (0..<image.width).collect { x -> image.getRGB(x, y) >>> 24 } },
            ]
        }
        void repaintEntireImage() { }
    }
}""",
}


def write_stubs(folder: Path) -> Path:
    """Write the classes into a folder that Groovy may look for them in."""
    for name, body in CLASSES.items():
        path = folder / f"{name}.groovy"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"package {name.rpartition('/')[0].replace('/', '.')}\n{body}\n")
    return folder
