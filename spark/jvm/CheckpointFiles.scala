package penstock

import java.io.{ByteArrayOutputStream, IOException}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{FileSystemException, Files, Paths, StandardCopyOption}
import java.util.UUID

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.{FSDataOutputStream, FileAlreadyExistsException, FileSystem, Path}
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager.CancellableFSDataOutputStream
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager

/** The files of a checkpoint, as Spark writes them, behind a guard (ADR 0017). Named by the setting
  * `spark.sql.streaming.checkpointFileManagerClass`; executors use it for state, too.
  *
  * A file that Spark never replaces (offsets, commits, metadata) is created once, whoever tries: by a conditional request on S3, by
  * a hard link in a folder. Before each file this class checks that the process still holds the claim of the checkpoint, where the
  * session names one. Both raise in the query, which then ends.
  */
class CheckpointFiles(root: Path, configuration: Configuration)
    extends FileSystemBasedCheckpointFileManager(root, configuration) {

  private val claim = Claim.of(configuration)

  /** In S3 a look for a file that may be a folder is a list, too: it costs twelve times as much, twice a batch. */
  override def exists(path: Path): Boolean =
    if (fs.getScheme != Once.S3 || !CheckpointFiles.ARE_FILES(path.getParent.getName)) super.exists(path)
    else
      try { fs.open(path).close(); true }
      catch { case _: java.io.FileNotFoundException => false }

  override def createAtomic(path: Path, overwriteIfPossible: Boolean): CancellableFSDataOutputStream =
    if (!overwriteIfPossible && Once.isKnown(fs)) new OnceStream(fs, path, claim)
    else if (fs.getScheme == Once.S3) new ObjectStream(fs, path, claim)
    else {
      claim.foreach(_.check())
      super.createAtomic(path, overwriteIfPossible)
    }

  /** Real-time mode removes the plans after the last finished batch when it starts. Those that a successor has made meanwhile are not
    * its own.
    */
  override def delete(path: Path): Unit = {
    if (path.getParent.getName == CheckpointFiles.PLANS) claim.foreach(_.check())
    super.delete(path)
  }
}

object CheckpointFiles {
  private val PLANS = "offsets"
  private val ARE_FILES = Set(PLANS, "commits")
}

/** The checkpoint has another holder: this process writes nothing more there. */
class ClaimLost(message: String) extends IOException(message)

/** The file that shows who may write to a checkpoint. In a folder one of its lines is the token; in an object store it is there. */
class Claim(file: Path, token: String, configuration: Configuration) {
  private lazy val files = file.getFileSystem(configuration)

  /** Raises ClaimLost, IOException. Asks the store each time. */
  def check(): Unit = if (!isHeld) throw new ClaimLost(s"another process has taken over $file")

  private def isHeld: Boolean =
    if (file.toUri.getScheme == Once.LOCAL) {
      // Opened and read: on a network file system only that asks the server.
      try new String(Files.readAllBytes(Paths.get(file.toUri.getPath)), UTF_8).linesIterator.contains(token)
      catch { case _: java.nio.file.NoSuchFileException => false }
    } else files.exists(file)
}

object Claim {
  val FILE = "spark.penstock.claim.file"
  val TOKEN = "spark.penstock.claim.token"

  def of(configuration: Configuration): Option[Claim] =
    Option(configuration.get(FILE)).filter(_.nonEmpty)
      .map(file => new Claim(new Path(file), configuration.get(TOKEN, ""), configuration))
}

/** Creates a file with all its content, or not at all, and never replaces one. */
object Once {
  val LOCAL = "file"
  val S3 = "s3a"

  /** Whether this file system can do it without a window. Of the others, HDFS renames without replacing, as Spark does by itself. */
  def isKnown(files: FileSystem): Boolean = files.getScheme == LOCAL || files.getScheme == S3

  /** Returns when the file has this content: then it does not matter who wrote it. An answer may be lost, and its request repeated.
    * Raises FileAlreadyExistsException when the file has another content; IOException when nobody knows.
    */
  def create(files: FileSystem, path: Path, content: Array[Byte]): Unit =
    try if (files.getScheme == S3) put(files, path, content) else link(files, path, content)
    catch {
      case error: IOException =>
        val found = read(files, path).getOrElse(throw error)
        if (!java.util.Arrays.equals(found, content)) {
          val exists = new FileAlreadyExistsException(s"$path exists with another content: another process wrote it")
          exists.initCause(error)
          throw exists
        }
    }

  private def put(files: FileSystem, path: Path, content: Array[Byte]): Unit = {
    // Mandatory: a store that does not know the option would replace the file.
    val option = "fs.option.create.conditional.overwrite"
    val out: FSDataOutputStream = files.createFile(path).overwrite(true).recursive().must(option, true).build()
    out.write(content)
    out.close()
  }

  private def link(files: FileSystem, path: Path, content: Array[Byte]): Unit = {
    val temporary = new Path(path.getParent, s".${path.getName}.${UUID.randomUUID}.tmp")
    try {
      val out = files.create(temporary, true)
      try out.write(content)
      finally out.close()
      val (from, to) = (Paths.get(temporary.toUri.getPath), Paths.get(path.toUri.getPath))
      try Files.createLink(to, from)
      catch {
        case error: java.nio.file.FileAlreadyExistsException => throw error
        case _: UnsupportedOperationException | _: FileSystemException => renameUnlessThere(files, temporary, path)
      }
      val sum = from.resolveSibling(s".${from.getFileName}.crc")
      if (Files.exists(sum)) Files.move(sum, to.resolveSibling(s".${to.getFileName}.crc"), StandardCopyOption.REPLACE_EXISTING)
    } finally files.delete(temporary, false)
  }

  /** Where there are no hard links. Two at once may both succeed there: only the claim is left. */
  private def renameUnlessThere(files: FileSystem, from: Path, to: Path): Unit = {
    if (files.exists(to)) throw new FileAlreadyExistsException(to.toString)
    if (!files.rename(from, to)) throw new IOException(s"$from cannot be renamed to $to")
  }

  private def read(files: FileSystem, path: Path): Option[Array[Byte]] =
    try {
      val in = files.open(path)
      try Some(in.readAllBytes())
      finally in.close()
    } catch { case _: java.io.FileNotFoundException => None }
}

/** A small file, kept in memory until it is closed. */
private class OnceStream(files: FileSystem, path: Path, claim: Option[Claim])
    extends CancellableFSDataOutputStream(new ByteArrayOutputStream) {
  private var ended = false

  override def close(): Unit = synchronized {
    if (!ended) {
      ended = true
      claim.foreach(_.check())
      Once.create(files, path, underlyingStream.asInstanceOf[ByteArrayOutputStream].toByteArray)
    }
  }

  override def cancel(): Unit = synchronized { ended = true }
}

/** An object of any size. It appears when it is closed, as S3's objects do, so it needs no other name before. */
private class ObjectStream(files: FileSystem, path: Path, claim: Option[Claim])
    extends CancellableFSDataOutputStream(files.create(path, true)) {
  private var ended = false

  override def close(): Unit = synchronized {
    if (!ended) {
      try claim.foreach(_.check())
      catch { case error: Throwable => cancel(); throw error }
      ended = true
      underlyingStream.close()
    }
  }

  override def cancel(): Unit = synchronized {
    if (!ended) {
      ended = true
      underlyingStream.asInstanceOf[FSDataOutputStream].abort()
    }
  }
}
