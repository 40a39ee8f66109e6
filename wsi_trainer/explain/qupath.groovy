/*
 * Loads the maps of a run into a QuPath project (QuPath 0.4 or newer).
 *
 * Create or open a project, then run this script in Automate > Script editor. For each slide of the run it
 *   - finds the slide in the project, or adds it where its file is known,
 *   - adds the outlined regions as annotations and the map as tiles with measurements
 *     (Measure > Show measurement maps colours them),
 *   - moves both where QuPath shows only the scanned part of a slide (MRXS and others),
 * and it lays the map over the slide that is open. Running it again replaces what it added before.
 */

import java.awt.image.BufferedImage
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.charset.StandardCharsets
import javafx.application.Platform
import qupath.lib.gui.viewer.overlays.BufferedImageOverlay
import qupath.lib.images.servers.ImageServerProvider
import qupath.lib.io.GsonTools
import qupath.lib.io.PathIO
import qupath.lib.regions.ImageRegion
import static qupath.lib.gui.scripting.QPEx.*

// The folder of the maps. Change it if the folder was moved.
folder = new File(FOLDER)

loadRun()

void loadRun() {
    def project = getProject()
    if (project == null) {
        println 'Create or open a project first (File > Project), then run this script again.'
        return
    }
    def listed = new File(folder, 'heatmaps.json')
    if (!listed.isFile()) {
        println "There is no ${listed}; change the folder in this script."
        return
    }
    def slides = GsonTools.getInstance().fromJson(listed.getText('UTF-8'), Map.class).slides
    slides.each { name, entry ->
        def image = imageOf(project, name, entry) ?: addedImage(project, entry)
        if (image == null)
            println "${name}: not in the project, and its file is not known; add the original slide and run again"
        else
            loadSlide(project, image, name, entry)
    }
    project.syncChanges()
    if (getQuPath() != null)
        Platform.runLater { getQuPath().refreshProject() }
}

/** The slide among those of the project: the same file, or one with its name. */
def imageOf(project, String name, Map entry) {
    def images = project.getImageList()
    if (entry.original != null) {
        def original = new File(entry.original)
        def same = images.find { image -> filesOf(image).any { it == original || it.getParentFile() == original } }
        if (same != null)
            return same
    }
    def wanted = stem(new File(entry.original ?: name).getName())
    return images.find { image -> filesOf(image).any { stem(it.getName()) == wanted } }
}

List<File> filesOf(image) {
    image.getURIs().findAll { it.getScheme() == 'file' }.collect { new File(it.getPath()) }
}

String stem(String name) {
    int dot = name.lastIndexOf('.')
    dot > 0 ? name.substring(0, dot) : name
}

/** Adds the slide to the project; null where its file is not there. */
def addedImage(project, Map entry) {
    def file = entry.original == null ? null : new File(entry.original)
    if (file == null || !file.exists())
        return null
    if (file.isDirectory())  // a DICOM series: any of its files stands for it
        file = file.listFiles().findAll { it.isFile() }.max { it.length() }
    def support = ImageServerProvider.getPreferredUriImageSupport(BufferedImage.class, file.toURI().toString())
    if (support == null || support.getBuilders().isEmpty())
        return null
    def image = project.addImage(support.getBuilders().get(0))
    image.setImageName(file.getName())
    return image
}

void loadSlide(project, image, String name, Map entry) {
    def shown = getCurrentImageData()
    boolean isShown = shown != null && project.getEntry(shown) == image
    def imageData = isShown ? shown : image.readImageData()
    def server = imageData.getServer()
    def shift = shiftOf(server.getWidth(), server.getHeight(), entry.place)
    if (shift == null) {
        println "${name}: QuPath shows ${server.getWidth()} x ${server.getHeight()} px, which is neither the slide nor " +
            'its scanned part; open the original slide'
        return
    }
    def objects = [entry.outlines, entry.tiles].findAll { it != null }.collectMany { objectsOf(new File(folder, it), shift) }
    def ids = objects.collect { it.getID() } as Set
    def hierarchy = imageData.getHierarchy()
    hierarchy.removeObjects(hierarchy.getAllObjects(false).findAll { ids.contains(it.getID()) }, true)
    hierarchy.addObjects(objects)
    image.saveImageData(imageData)
    if (isShown)
        overlay(entry, shift)
    println "${name}: ${objects.size()} objects"
}

/** The offset of positions in the slide, x and y; null where the image is another one. */
List<Integer> shiftOf(int width, int height, Map place) {
    if (width == (int) place.shape[1] && height == (int) place.shape[0])
        return [0, 0]
    def bounds = place.bounds  // y, x, height, width
    if (bounds != null && width == (int) bounds[3] && height == (int) bounds[2])
        return [-(int) bounds[1], -(int) bounds[0]]
    return null
}

List objectsOf(File file, List<Integer> shift) {
    def found = GsonTools.getInstance().fromJson(file.getText('UTF-8'), Map.class)
    moved(found, shift)
    def text = GsonTools.getInstance().toJson(found)
    return PathIO.readObjectsFromGeoJSON(new ByteArrayInputStream(text.getBytes(StandardCharsets.UTF_8)))
}

void moved(Map found, List<Integer> shift) {
    for (feature in found.features)
        for (ring in feature.geometry.coordinates)
            for (point in ring) {
                point[0] += shift[0]
                point[1] += shift[1]
            }
}

/** Lays the map over the open slide: what speaks for the class, in one colour, clearer where there is less. */
void overlay(Map entry, List<Integer> shift) {
    def viewer = getCurrentViewer()
    if (viewer == null)
        return
    def map = readMap(new File(folder, entry.array))
    def (x, y, width, height) = areaOf(map.width, map.height, entry)
    def region = ImageRegion.createInstance(x + shift[0], y + shift[1], width, height, 0, 0)
    def picture = painted(map)
    Platform.runLater {
        viewer.setCustomPixelLayerOverlay(new BufferedImageOverlay(viewer.getOverlayOptions(), region, picture))
        viewer.repaintEntireImage()
    }
}

/** The part of the slide that a map covers: x, y, width and height. */
List<Integer> areaOf(int columns, int rows, Map entry) {
    def place = entry.place
    double stride = entry.stride
    [place.origin[1], place.origin[0], columns * stride * place.scale[1], rows * stride * place.scale[0]].collect {
        (int) Math.round((double) it)
    }
}

/** A file of numpy, of 32-bit numbers in rows. */
Map readMap(File file) {
    def bytes = ByteBuffer.wrap(file.bytes).order(ByteOrder.LITTLE_ENDIAN)
    int start = bytes.get(6) == 1 ? 10 : 12
    int length = start == 10 ? bytes.getShort(8) & 0xFFFF : bytes.getInt(8)
    def header = new String(file.bytes, start, length, StandardCharsets.ISO_8859_1)
    def shape = (header =~ /'shape': \((\d+), (\d+)\)/)
    if (!header.contains("'<f4'") || !header.contains("'fortran_order': False") || !shape.find())
        throw new IOException("${file} is not a map")
    int rows = shape.group(1) as int
    int columns = shape.group(2) as int
    float[] values = new float[rows * columns]
    bytes.position(start + length)
    bytes.slice().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer().get(values)
    return [width: columns, height: rows, values: values]
}

BufferedImage painted(Map map) {
    float[] values = map.values
    float largest = 0
    for (value in values)
        largest = Math.max(largest, value)
    int[] colours = new int[values.length]
    for (int i = 0; i < values.length; i++) {
        double strength = largest > 0 ? Math.sqrt(Math.max(0, values[i]) / largest) : 0
        colours[i] = ((int) Math.round(200 * strength) << 24) | 0xC81E1E
    }
    def picture = new BufferedImage(map.width, map.height, BufferedImage.TYPE_INT_ARGB)
    picture.setRGB(0, 0, map.width, map.height, colours, 0, map.width)
    return picture
}
